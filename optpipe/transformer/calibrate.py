"""Learn a GPU's parameters from what was measured, with their uncertainty, and how far a prediction can be trusted.

All parameters are positive, and every prediction is a product or a sum of their powers, so that logarithms are used:
a prior is normal around the preset (`Gpu.covariance`), errors of predictions are alike in percent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from optpipe.errors import InputError
from optpipe.model.arrays import Floats
from optpipe.transformer.gpu import PARAMETERS, Gpu
from optpipe.transformer.iterations import Iteration, iteration_ms

NAMES = tuple(PARAMETERS)
STEP = -1e-3  # of a logarithm, for derivatives: down, since fractions end at 1
ROUNDS, STEPS = 3, 30
HUBER = 1.5  # standard deviations from which on an error counts by its size, not by its square
UNEXPLAINED = "unexplained"  # what no parameter explains
SURE = 1e-3  # the least standard deviation of an error
LEAST = 1e-9  # instead of a parameter that is 0


class Observation(NamedTuple):
    """Something that was measured, and what a GPU of some parameters would take for it; both in ms."""

    predict: Callable[[Gpu], float]
    measured_ms: float


def logarithms(gpu: Gpu) -> Floats:
    """The logarithms of the parameters, in the order of `NAMES`."""
    return np.log([max(getattr(gpu, name), LEAST) for name in NAMES])


def with_logarithms(gpu: Gpu, values: Floats) -> Gpu:
    """The GPU with these parameters; fractions are at most 1."""
    numbers = np.exp(values)
    return gpu.model_copy(
        update={
            name: float(min(1.0, number) if name.endswith("fraction") else number)
            for name, number in zip(NAMES, numbers, strict=True)
        }
    )


def covariance(gpu: Gpu) -> Floats:
    """The covariance of `logarithms(gpu)`: what was learned, or what is assumed of a GPU of which nothing was."""
    if gpu.covariance is None:
        return np.diag([PARAMETERS[name] ** 2 for name in NAMES])
    return np.array(gpu.covariance)


def gradient(predict: Callable[[Gpu], float], gpu: Gpu) -> Floats:
    """The derivatives of a prediction's logarithm by those of the parameters."""
    values = logarithms(gpu)
    base = np.log(predict(gpu))
    nudged = [values + STEP * np.eye(len(NAMES))[n] for n in range(len(NAMES))]
    return np.array([(np.log(predict(with_logarithms(gpu, each))) - base) / STEP for each in nudged])


def ratio_variances(gpu: Gpu, slopes: Floats) -> dict[str, float]:
    """What the variance of the logarithm of a ratio of two predictions for a GPU consists of: by parameter (the delta
    method; with correlations one may be negative), and `UNEXPLAINED` of both predictions, which err independently.

    `slopes` is the `gradient` of one prediction less that of the other: what both depend on alike is certain.
    """
    shares = slopes * (covariance(gpu) @ slopes)
    return dict(zip(NAMES, shares.tolist(), strict=True)) | {UNEXPLAINED: 2 * gpu.unexplained**2}


def calibrate(gpu: Gpu, observations: Sequence[Observation]) -> Gpu:
    """Learn a GPU's parameters by robust least squares around the prior: its parameters and their covariance.

    Returns the GPU with the parameters of the largest posterior, their covariance (Laplace's approximation), and the
    standard deviation of the errors that are left, outliers aside, as `unexplained`. Raises InputError if there is
    nothing to learn from, or a parameter is 0.

    Notes
    -----
    Levenberg (1944) and Marquardt (1963) with the weights of Huber (1964). The standard deviation that an error is
    compared with is estimated from the errors themselves (the median of their sizes over 0.67), round by round. Few
    of them are small because parameters follow them. So `unexplained`, with which the covariance is computed, is at
    least (number of parameters / number of observations)^½ of what it was before, or all of it if that is more than 1.
    """
    if not observations:
        raise InputError("observations = 0: at least one measurement is needed")
    for name in NAMES:
        if getattr(gpu, name) == 0:
            raise InputError(f"{name} = 0: expected a number above 0 to begin with, such as a preset's")
    prior: Floats = logarithms(gpu)
    precision: Floats = np.linalg.inv(covariance(gpu)).astype(np.float64)
    measured: Floats = np.log([each.measured_ms for each in observations])

    def residuals(values: Floats) -> Floats:
        other = with_logarithms(gpu, values)
        return np.log([each.predict(other) for each in observations]) - measured

    values, sigma = prior, max(gpu.unexplained, SURE)
    for _ in range(ROUNDS):
        values, hessian = _minimize(residuals, values, prior, precision, sigma)
        information = (hessian - precision) * sigma**2
        sigma = max(float(np.median(abs(residuals(values)))) / 0.67, SURE)
    unexplained = max(sigma, gpu.unexplained * min(1.0, len(NAMES) / len(observations)) ** 0.5)
    learned = with_logarithms(gpu, values)
    return learned.model_copy(
        update={
            "covariance": tuple(map(tuple, np.linalg.inv(precision + information / unexplained**2).tolist())),
            "unexplained": unexplained,
        }
    )


def learn(gpu: Gpu, iterations: Sequence[Iteration], kernels: Sequence[Observation] = ()) -> Gpu:
    """Learn a GPU's parameters from measured iterations by 1F1B, and from kernels, as `calibrate` does.

    Raises InputError if there are none, or a parallelism does not divide its model.
    """

    def observation(row: Iteration) -> Observation:
        estimated = row.on(gpu)
        return Observation(lambda other: iteration_ms(estimated.on(other)), row.measured_ms)

    for row in iterations:
        gpu = gpu.model_copy(update={"measured": row.on(gpu).extent.joined(gpu.measured)})
    return calibrate(gpu, [*map(observation, iterations), *kernels])


def _minimize(
    residuals: Callable[[Floats], Floats], values: Floats, prior: Floats, precision: Floats, sigma: float
) -> tuple[Floats, Floats]:
    """The minimum of Huber's loss and the prior's, and the Hessian there by Gauss and Newton."""

    def cost(left: Floats, values: Floats) -> float:
        size = abs(left) / sigma
        loss = np.where(size < HUBER, size**2, HUBER * (2 * size - HUBER)).sum()
        return float(loss + (values - prior) @ precision @ (values - prior))

    most = np.array([0.0 if name.endswith("fraction") else np.inf for name in NAMES])
    left, damping = residuals(values), 1e-2
    for _ in range(STEPS):
        nudged = [residuals(values + STEP * each) for each in np.eye(len(values))]
        jacobian = np.array([(each - left) / STEP for each in nudged]).T / sigma
        weights = np.minimum(1.0, HUBER * sigma / np.maximum(abs(left), 1e-12))
        hessian = jacobian.T @ (jacobian * weights[:, None]) + precision
        slope = jacobian.T @ (weights * left / sigma) + precision @ (values - prior)
        before = cost(left, values)
        while True:
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -slope)
            further = np.minimum(values + np.clip(step, -0.5, 0.5), most)
            further_left = residuals(further)
            gain = before - cost(further_left, further)
            if gain > 0 or damping > 1e6:
                break
            damping *= 4
        if gain <= 0:
            break
        values, left, damping = further, further_left, damping / 3
        if gain < 1e-3:
            break
    return values, hessian
