"""Log records that name the rank they come from."""

from __future__ import annotations

import logging

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
logger = logging.getLogger("iris")


def set_logger_level(level: int) -> None:
    """Set from which level on records of `Context.info`, `debug`, `warning` and `error` are shown; INFO at first.

    Args:
        level: DEBUG, INFO, WARNING or ERROR, of `iris_core` or of ``logging``.
    """
    logger.setLevel(level)


def log(level: int, message: str, rank: int, num_ranks: int) -> None:
    """Log a message of a rank, which the record has as `iris_rank` and `iris_num_ranks`.

    Where the application has set up no handler, the first message adds one that writes to stderr.
    """
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s [Iris] [%(iris_rank)s/%(iris_num_ranks)s] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(INFO)
    logger.log(level, message, extra={"iris_rank": rank, "iris_num_ranks": num_ranks})
