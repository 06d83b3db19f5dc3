"""Three small tasks of lm-eval with local data, one of each kind of request: nothing is fetched from a network."""

import json
from pathlib import Path

_YAML = {
    "multiple_choice": """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}} Answer:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
""",
    "generate_until": """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 6, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
""",
    "loglikelihood_rolling": """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: bits_per_byte}}
  - {{metric: byte_perplexity}}
""",
}
TASKS = {"local_choice": "multiple_choice", "local_text": "generate_until", "local_bytes": "loglikelihood_rolling"}


def write_tasks(folder: Path, examples: int = 12) -> Path:
    """Write the tasks and their data; returns the folder."""
    folder.mkdir(parents=True)
    words = ["return", "class", "def main", "naïve 漢字", "argv", "for x in"]
    rows = [
        {
            "question": f"{words[i % 6]} {i}",
            "choices": [words[(i + j) % 6] for j in range(4)],
            "answer": i % 4,
            "text": " ".join(words[(i + j) % 6] for j in range(3 + 4 * i)),
        }
        for i in range(examples)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind in TASKS.items():
        text = _YAML[kind].format(name=name, data=folder / "data.jsonl")
        (folder / f"{name}.yaml").write_text(text.lstrip())
    return folder
