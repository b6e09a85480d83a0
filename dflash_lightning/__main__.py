"""``python -m dflash_lightning`` is the same as the console script ``dflash-lightning``."""

from dflash_lightning.cli import main

if __name__ == "__main__":
    main()
