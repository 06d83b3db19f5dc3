"""Importing this module lets Ctrl-C end the process without a traceback.

It is meant for imports, which take seconds, before a command handles Ctrl-C itself (`scripts.command.end`), and for
processes of which the parent handles it: a terminal sends it to all.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as in the background
    signal.signal(signal.SIGINT, signal.SIG_DFL)
