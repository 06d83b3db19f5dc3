"""`python -m keel`: the command `keel`."""

from . import run

if __name__ == "__main__":
    run()
