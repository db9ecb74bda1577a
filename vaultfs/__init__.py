"""vaultfs: every save in a shared folder of documents atomic, locked and recoverable."""

__version__ = "0.1.0"
