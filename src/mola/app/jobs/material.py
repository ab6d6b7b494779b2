"""The data of a job: opened alike, and fitting to the networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from mola.app.jobs.datasets import UserSet, open_set
from mola.app.jobs.folder import describe_inputs
from mola.app.jobs.job import Job
from mola.app.jobs.networks import Built
from mola.app.jobs.pictures import Pictures, shown_by
from mola.app.jobs.preparation import settle
from mola.app.jobs.rows import Account, Loader
from mola.app.jobs.shards import divided
from mola.distributed import Team
from mola.errors import DataError
from mola.network import call

__all__ = ["Material", "Progress"]

Progress = Callable[[str, float], None]


class Material:
    """The sets of a job.

    Args:
        job: names them.
        built: the networks.
        account: where inputs that are left out are noted.
        progress: told what is being done, and which share of the work is done.
        team: the processes that do the job; each reads its own part of every set.

    Raises:
        DataError: if data and networks do not fit together.

    Attributes:
        intake: settled by the job, the networks and the training data.
        classes: names, in the order of the networks' outputs, or None.
        outputs: how many classes there are.
        inputs: what they look like.
        first: a few of the training inputs, as the networks take them.
        train: the training data.
        val: the validation data, or None.
        outliers: data for tuning, or None.
    """

    def __init__(self, job: Job, built: Built, account: Account, progress: Progress, team: Team | None = None) -> None:
        """Open all sets, and look at the first training inputs.

        Raises:
            DataError: if data and networks do not fit together.
        """
        self.job, self.account, self.progress = job, account, progress
        self.team = Team.alone() if team is None else team
        floats = [one.dtype for one in built.networks[0].parameters() if one.is_floating_point()]
        dtype = str(floats[0] if floats else torch.float32).removeprefix("torch.")
        self.intake = settle(job, built.hints, dtype)
        self.classes = job.classes if isinstance(job.classes, tuple) else built.hints.classes
        self.outputs = 0
        self.train, first = self._open_train(str(job.train))
        self.first = first
        self.classes = self.classes or self.train.classes
        self.inputs = describe_inputs(first)
        self.outputs = self._outputs(built, first)
        if isinstance(job.classes, int) and job.classes != self.outputs:
            message = (
                f"--classes {job.classes} was given, but the networks have {self.outputs} outputs: leave --classes out, or name all "
                f"{self.outputs} classes."
            )
            raise DataError(message)
        if self.classes is not None and len(self.classes) != self.outputs:
            many = len(self.classes)
            advice = (
                f"remove what is no class from {job.train}, or use networks with {many} outputs"
                if self.classes == self.train.classes and many > self.outputs
                else "name all of them, in the order of the outputs, with --classes"
            )
            message = (
                f"{many} classes ({', '.join(self.classes[:5])}{', ...' if many > 5 else ''}) for a network with {self.outputs} "
                f"outputs: {advice}."
            )
            raise DataError(message)
        # Again, now that it is known which labels there can be.
        self.train = self._open(str(job.train), labelled=True)
        self.val = None if job.val is None else self._open(job.val, labelled=True)
        self.outliers = None if job.outliers is None else self._open(job.outliers, labelled=False)

    def _outputs(self, built: Built, first: Any) -> int:
        """How many classes the networks have.

        Raises:
            DataError: if they cannot take the inputs.
        """
        try:
            return call(built.networks[0].eval(), first).shape[1]
        except DataError as error:
            if not isinstance(self.train, Pictures) or self.intake.shape is None:
                raise
            channels, height, width = self.intake.shape
            message = (
                f"the network does not take the images as they are, {height}x{width} with {channels} channels: bring them to the size "
                f"that it was trained on with --resize HEIGHTxWIDTH (and --crop), to its channels with --mode RGB or L. {error}"
            )
            raise DataError(message) from error

    def _open_train(self, name: str) -> tuple[UserSet, Any]:
        """The training data and their first inputs, which show what nobody has said.

        Raises:
            DataError: if none can be used.
        """
        train = self._open(name, labelled=True)
        if isinstance(train, Pictures):
            mode, shape = shown_by(train)
            self.intake = replace(self.intake, mode=mode, shape=shape)
            train = train.taken_by(self.intake)
        for rows in train.taken_by(replace(self.intake, batch_size=min(8, self.intake.batch_size))):
            if rows.inputs is not None:
                if isinstance(rows.inputs, torch.Tensor):
                    self.intake = replace(self.intake, shape=tuple(rows.inputs.shape[1:]))
                return train, rows.inputs
        message = f"{name} holds no input that can be used."
        raise DataError(message)

    def _open(self, name: str, *, labelled: bool) -> UserSet:
        return open_set(
            name,
            self.intake,
            labelled=labelled,
            classes=self.classes,
            outputs=self.outputs or None,
            directory=self.job.directory,
            seed=self.job.seed,
            download=self.job.download,
        )

    def loader(self, source: UserSet, doing: str, start: float, end: float, *, labelled: bool = True) -> Loader:
        """A set as a loader that tells how far it has been read, as a part of the whole work."""
        self.progress(doing, start)
        return Loader(
            divided(source, self.team),
            self.account,
            self.job.strict,
            labelled,
            lambda share: self.progress(doing, start + (end - start) * share),
            whole=self.team.size == 1,
        )
