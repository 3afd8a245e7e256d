"""``python -m ebbtide``: the command line, for launchers that start a module on each rank."""

from ebbtide.tools.main import app

if __name__ == "__main__":
    app()
