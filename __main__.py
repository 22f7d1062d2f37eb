"""The `tokenmill` command; also `python -m tokenmill`.

Each worker process imports the module that started the command, so this one imports only when it is called.
"""


def main() -> None:
    """Run the command line and exit with its code."""
    from tokenmill.flows.cli import main as run

    run()


if __name__ == "__main__":
    main()
