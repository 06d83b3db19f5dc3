"""`keel plan --prove`: a job's run, rehearsed by one process as one rank after another, and what each waits for."""
