"""How a process joins the others that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from mola.distributed.team import PATIENCE, Team
from mola.errors import OptionError

__all__ = ["join"]

REACHING = timedelta(minutes=10)
"""How long processes may take to find each other, and a collective to go through."""


@contextmanager
def join(*, backend: str | None = None, patience: float = PATIENCE) -> Iterator[Team]:
    """Work with the other processes that torchrun started; a script started without it is a team of one.

    Args:
        backend: of torch.distributed; None is NCCL where there are GPUs, with the process's own as current device, else gloo.
        patience: seconds without a sign of life after which a process counts as lost.

    Yields:
        The team. An error that ends this process inside the context ends the others too.

    Raises:
        OptionError: if the environment is only half set up.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if size != "1" and missing and not dist.is_initialized():
        message = f"WORLD_SIZE is {size}, but {' and '.join(missing)} is not set. Start the script with torchrun."
        raise OptionError(message)
    own = size != "1" and not dist.is_initialized()
    if own:
        if torch.cuda.is_available() and backend != "gloo":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group(
            backend or ("nccl" if torch.cuda.is_available() else "gloo"), init_method="env://", timeout=REACHING
        )
    team = Team(patience=patience) if dist.is_initialized() else Team.alone()
    try:
        yield team
    except BaseException as error:
        # The group is not taken down in good order: processes that wait for each other would wait here again.
        team.close(error)
        raise
    team.close()
    if own:
        dist.destroy_process_group()
