"""`CostModel`: what F, B, W and the bytes of a micro-batch follow from, learnt while training, and the rules that its
steps follow.

Each figure of a stage is a sum of non-negative multiples of features, and a constant. It is fitted to a window of what
was measured, anew after each step, by iteratively reweighted least squares (Huber 1964, Holland and Welsch 1977), on
coefficients that are not negative (Lawson and Hanson 1974).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from optpipe.errors import InputError, did_you_mean, shown
from optpipe.files import write_file
from optpipe.model.arrays import Floats
from optpipe.model.problem import Problem
from optpipe.model.records import COMPUTE_MS, EXCHANGE, Document, Items, Name, Record, StageCosts, each_microbatch
from optpipe.model.rules import Rules, RulesRecord

WINDOW = 512  # micro-batches that a model remembers
LATEST = 128  # of them whose errors it remembers
ROUNDS, SWEEPS = 12, 200  # of reweighting; most changes of which coefficients are positive, in each
HUBER = 1.345  # standard deviations beyond which a residual counts linearly: 95 % efficient with normal errors
MOST_ERROR = 1e6  # where nothing was measured and something predicted
LEAST_SPREAD = 1e-9  # of residuals, as a share of the figures

Number = Annotated[float, Field(strict=True, ge=0, le=2.0**53, allow_inf_nan=False)]

# What micro-batches do not differ in.
ONCE = ("offload_parts", "gradient_out_ms", "update_ms", "parameters_in_ms", *EXCHANGE)
LEAVING = ("offload_bytes", "evict_bytes")
PARTS_OF_ACTIVATION = {"checkpoint_bytes", *LEAVING}
LEARNT = tuple(name for name in StageCosts.model_fields if name not in (*ONCE, "levels"))


class StepRules(NamedTuple):
    """Rules that a step follows, from which the search for another step's can start.

    Attributes
    ----------
    rules
        As of `Schedule.rules`.
    step
        The problem that they are for. For another one they follow from its times, and from which of its micro-batches
        are light and heavy.
    """

    rules: Rules
    step: Problem


class _StepRules(Record):
    rules: RulesRecord
    step: Problem


class _File(Document):
    """What a model remembers: its window, how far its last predictions were off, and the rules of the last step."""

    WHAT = "cost model"

    format: Literal["optpipe.cost-model/1"] = "optpipe.cost-model/1"
    features: Annotated[Items[Name], Field(min_length=1, max_length=64)]
    stages: Annotated[int, Field(strict=True, ge=1, le=4096)]
    figures: Annotated[Items[Name], Field(min_length=1, max_length=16)]
    inputs: Annotated[Items[Items[Number]], Field(max_length=WINDOW)]
    outputs: Annotated[Items[Items[Items[Number]]], Field(max_length=WINDOW)]
    errors: Annotated[Items[Items[Items[Number]]], Field(max_length=LATEST)]
    rules: _StepRules | None = None

    @model_validator(mode="after")
    def _of_one_shape(self) -> _File:
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"outputs has {len(self.outputs)} entries: one for each of {len(self.inputs)} inputs")
        for n, row in enumerate(self.inputs):
            if len(row) != len(self.features):
                raise ValueError(f"inputs[{n}] has {len(row)} entries: there are {len(self.features)} features")
        for name, tables in (("outputs", self.outputs), ("errors", self.errors)):
            for n, table in enumerate(tables):
                if len(table) != self.stages or {len(row) for row in table} != {len(self.figures)}:
                    shape = f"{self.stages} stages with {len(self.figures)} figures"
                    raise ValueError(f"{name}[{n}]: {shape} were expected")
        return self


class CostModel:
    """Learns the figures of stages from features of micro-batches.

    Parameters
    ----------
    features
        Their names, such as `("tokens", "squares")` for the tokens and the sum of squared lengths of documents.
    stages
        How many stages there are.
    figures
        Which figures of a stage are learnt: fields of `Stage` that may differ by micro-batch.

    Attributes
    ----------
    rules
        Of the last step that was scheduled by these costs; None if there was none. The next search starts from them,
        also in another training.
    """

    def __init__(
        self, features: Sequence[str], stages: int, figures: Sequence[str] = (*COMPUTE_MS, "activation_bytes")
    ) -> None:
        for name in figures:
            if name not in LEARNT:
                raise InputError(f"figures: {shown(name)} is not learnt{did_you_mean(str(name), LEARNT, '; ')}")
        self.features, self.figures, self.stages = tuple(features), tuple(figures), stages
        self._inputs = np.zeros((0, len(self.features)))
        self._outputs = np.zeros((0, stages, len(self.figures)))
        self._errors = np.zeros((0, stages, len(self.figures)))
        self.rules: StepRules | None = None

    def learn(
        self, microbatches: Sequence[Mapping[str, float]], measured: Sequence[Mapping[str, Sequence[float]]]
    ) -> None:
        """Learn what a step's micro-batches took. Before that the errors of their predictions are noted.

        Parameters
        ----------
        microbatches
            The features of each.
        measured
            By stage: each figure with one number a micro-batch.

        Raises
        ------
        InputError
            If one is missing, no finite number or negative.
        """
        inputs = self._read(microbatches)
        if len(measured) != self.stages:
            raise InputError(f"measured has {len(measured)} entries: there are {self.stages} stages")
        outputs = np.zeros((len(inputs), self.stages, len(self.figures)))
        for s, figures in enumerate(measured):
            for f, name in enumerate(self.figures):
                if name not in figures:
                    raise InputError(f"measured[{s}].{name} is missing")
                if len(figures[name]) != len(inputs):
                    raise InputError(
                        f"measured[{s}].{name} has {len(figures[name])} entries: one for each of {len(inputs)} "
                        "micro-batches was expected"
                    )
                for j, value in enumerate(figures[name]):
                    outputs[j, s, f] = _number(value, f"measured[{s}].{name}[{j}]")
        if len(self._inputs):
            predicted = self._predict(inputs)
            errors = np.minimum(np.abs(predicted - outputs) / np.maximum(outputs, LEAST_SPREAD), MOST_ERROR)
            self._errors = np.concatenate([self._errors, errors])[-LATEST:]
        self._inputs = np.concatenate([self._inputs, inputs])[-WINDOW:]
        self._outputs = np.concatenate([self._outputs, outputs])[-WINDOW:]
        self.__dict__.pop("_coefficients", None)
        self.__dict__.pop("_worst", None)

    def errors(self) -> list[dict[str, float]] | None:
        """By stage, of each figure: the median relative error of the last predictions, each from before its micro-batch
        was learnt. None before there is one."""
        if not len(self._errors):
            return None
        medians = np.median(self._errors, axis=0)
        return [dict(zip(self.figures, row, strict=True)) for row in medians.tolist()]

    def problem(self, template: Problem, microbatches: Sequence[Mapping[str, float]]) -> Problem:
        """The template with a step's micro-batches: what is learnt is predicted, all else is the template's.

        Bytes are as many times what is predicted as the worst of the window was above its fit, those that leave the
        device as the worst was below it, so that a certificate holds for what was seen.

        Raises InputError if nothing is learnt yet, a feature is missing, a figure that is not learnt has a number for
        each micro-batch, or a stage has levels.
        """
        for s, stage in enumerate(template.stages):
            if stage.levels is not None:
                raise InputError(
                    f"stages[{s}].levels: a cost model learns no levels, only recompute_ms and checkpoint_bytes"
                )
        if len(template.stages) != self.stages:
            raise InputError(f"stages has {len(template.stages)} entries: the cost model knows {self.stages}")
        predicted = self._predict(self._read(microbatches))
        stages = []
        for s, stage in enumerate(template.stages):
            figures: dict[str, Any] = {}
            for f, name in enumerate(self.figures):
                values = predicted[:, s, f]
                if name.endswith("_bytes"):
                    rounded = np.floor if name in LEAVING else np.ceil
                    figures[name] = tuple(rounded(values * self._worst[s, f]).astype(np.int64).tolist())
                else:
                    figures[name] = tuple(values.tolist())
            activation = figures.get("activation_bytes", stage.activation_bytes)
            for name in PARTS_OF_ACTIVATION & figures.keys():
                figures[name] = each_microbatch(min, figures[name], activation)
            stages.append(stage.model_copy(update=figures))
        return template.replace(microbatches=len(microbatches), stages=stages)

    def added_ms(self, documents: Sequence[Mapping[str, float]]) -> Floats:
        """(n,) how much longer the F, B and W of all stages take together with each of these documents.

        Raises InputError if nothing is learnt yet, or a feature is missing.
        """
        times = [f for f, name in enumerate(self.figures) if name in COMPUTE_MS]
        each: Floats = self._read(documents, "documents") @ self._coefficients[:, times, :-1].sum(axis=(0, 1))
        return each

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, whole or not at all. Raises InputError if it cannot be written."""
        file = _File.from_dict(
            {
                "features": self.features,
                "stages": self.stages,
                "figures": self.figures,
                "inputs": self._inputs.tolist(),
                "outputs": self._outputs.tolist(),
                "errors": self._errors.tolist(),
                "rules": self.rules
                and {"rules": RulesRecord.from_rules(self.rules.rules), "step": self.rules.step.to_dict()},
            }
        )
        write_file(path, file.model_dump_json(exclude_none=True) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Reads a file of `save`. Raises InputError if it cannot be read or a field is wrong."""
        file = _File.load(path)
        model = cls(file.features, file.stages, file.figures)
        shape = -1, file.stages, len(file.figures)
        model._inputs = np.array(file.inputs, dtype=np.float64).reshape(-1, len(file.features))
        model._outputs = np.array(file.outputs, dtype=np.float64).reshape(shape)
        model._errors = np.array(file.errors, dtype=np.float64).reshape(shape)
        model.rules = StepRules(file.rules.rules.rules(), file.rules.step) if file.rules else None
        return model

    def _read(self, microbatches: Sequence[Mapping[str, float]], what: str = "microbatches") -> Floats:
        """(m, features) of micro-batches."""
        if not microbatches:
            raise InputError(f"{what} is empty: a step has at least one")
        rows = np.zeros((len(microbatches), len(self.features)))
        for j, microbatch in enumerate(microbatches):
            for f, name in enumerate(self.features):
                if name not in microbatch:
                    raise InputError(f"{what}[{j}].{name} is missing: the cost model follows from it")
                rows[j, f] = _number(microbatch[name], f"{what}[{j}].{name}")
        return rows

    def _predict(self, inputs: Floats) -> Floats:
        predicted: Floats = np.einsum("nk,sfk->nsf", _with_constant(inputs), self._coefficients)
        return predicted

    @cached_property
    def _coefficients(self) -> Floats:
        """(stages, figures, features + 1) of the window."""
        if not len(self._inputs):
            raise InputError("the cost model has learnt nothing yet: call learn after a step")
        inputs = _with_constant(self._inputs)
        fits = [
            [robust_fit(inputs, self._outputs[:, s, f]) for f in range(len(self.figures))] for s in range(self.stages)
        ]
        return np.array(fits)

    @cached_property
    def _worst(self) -> Floats:
        """(stages, figures) how many times its fit the window's worst took: 1 or more, of what leaves 1 or less."""
        factors = self._outputs / np.maximum(self._predict(self._inputs), 1.0)
        leaving = np.isin(self.figures, LEAVING)
        worst: Floats = np.where(leaving, factors.min(axis=0).clip(max=1.0), factors.max(axis=0).clip(min=1.0))
        return worst


def robust_fit(inputs: Floats, output: Floats) -> Floats:
    """The non-negative coefficients (k,) by which `inputs` (n, k) come closest to `output` (n,), where residuals far
    beyond the usual count linearly."""
    scale = np.maximum(np.abs(inputs).max(axis=0), LEAST_SPREAD)
    scaled, weights = inputs / scale, np.ones(len(output))
    for _ in range(ROUNDS):
        weighted = scaled * weights[:, None]
        coefficients = _non_negative(scaled.T @ weighted, weighted.T @ output)
        off = np.abs(scaled @ coefficients - output)
        spread = max(float(np.median(off)) / 0.6745, LEAST_SPREAD * float(np.abs(output).max() + LEAST_SPREAD))
        weights = HUBER * spread / np.maximum(off, HUBER * spread)
    fit: Floats = coefficients / scale
    return fit


def _non_negative(gram: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimizes x'Gx / 2 - t'x: each passive set is solved exactly (Lawson and Hanson 1974)."""
    passive = np.zeros(len(target), dtype=bool)
    x = np.zeros(len(target))
    limit = 1e-12 * max(float(np.abs(target).max()), LEAST_SPREAD)
    for _ in range(SWEEPS):
        slope = np.where(passive, -np.inf, target - gram @ x)
        if slope.max() <= limit:
            break
        passive[int(slope.argmax())] = True
        while True:
            new = np.zeros(len(x))
            new[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], target[passive], rcond=None)[0]
            sinking = np.flatnonzero(passive & (new <= 0))
            if not len(sinking):
                break
            steps = x[sinking] / np.maximum(x[sinking] - new[sinking], np.finfo(float).tiny)
            x += steps.min() * (new - x)
            passive[sinking[steps.argmin()]] = False
            x[~passive] = 0.0
        x = new
    return x


def _with_constant(inputs: Floats) -> Floats:
    return np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)


def _number(value: Any, field: str) -> float:
    """A number for the model. Raises InputError if it is none, not finite or negative."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value <= 2.0**53:
        raise InputError(f"{field} = {shown(value)}: a number from 0 to 2^53 was expected")
    return float(value)
