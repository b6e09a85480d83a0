"""``python -m dflash_lightning`` is the same as the console script ``dflash-lightning``."""

import sys

from dflash_lightning.missing import missing_package


def main() -> None:
    """The command line; one message where it can't even be loaded, as a package isn't installed."""
    try:
        from dflash_lightning.cli import main as command_line
    except ModuleNotFoundError as error:
        if "--debug" in sys.argv or (message := missing_package(error)) is None:
            raise
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)
    command_line()


if __name__ == "__main__":
    main()
