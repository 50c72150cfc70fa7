"""What runs today, such as `tp 8, pp 4, 1f1b`: where a plan starts, and what it is compared with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from optpipe.errors import InputError
from optpipe.formats import megatron
from optpipe.model.placement import SHAPES
from optpipe.schedule import Schedule
from optpipe.transformer.estimate import Estimate, estimate
from optpipe.transformer.records import Parallelism, Recompute
from optpipe.transformer.work import LEVELS
from optpipe_solver.planner import settings
from optpipe_solver.planner.candidate import ROOMY, Candidate
from optpipe_solver.planner.candidates import Question, zeros
from optpipe_solver.systems import SYSTEMS, generate

DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "zero", "chunks", "sequences")  # sequences of one micro-batch
# By our names, those of NVIDIA's tables, and Megatron-LM's, which Megatron-Bridge has with _ for -.
NAMES = {name: name for name in (*DEGREES, "recompute")} | {"vp": "chunks", "mbs": "sequences", "gbs": "batch"}
NAMES |= {name: short for name, short in megatron.NAMES.items() if short != "group"}
NAMES |= {name[2:]: short for short, name in settings.MEGATRON.items()} | {"micro-batch-size": "sequences"}
NAMES |= {"expert-tensor-parallel-size": "etp", "recompute-granularity": "recompute", "vpp": "chunks"}
NAMES |= {f"decoder-{end}-pipeline-num-layers": end for end in ("first", "last")}
NAMES |= {f"num-layers-in-{end}-pipeline-stage": end for end in ("first", "last")}
NAMES |= {"num-layers-per-virtual-pipeline-stage": "layers of a chunk"}
SPLIT = {f"account-for-{end}-in-pipeline-split": end for end in ("embedding", "loss")}
UNSET = ("null", "none", "n/a")
MODULES: dict[str, Recompute] = {"core_attn": "selective", "layernorm": "cheap", "moe_act": "cheap"}  # of Megatron
_OPTION = re.compile(r"(?<![^\s,])-*(?:\w+\.)*(\w[\w-]*)\s*[=:]\s*")  # before its value


@dataclass(frozen=True)
class Today:
    """What runs today: degrees that are named, and the published schedule. What is not named is the stack's default.

    `written` has the `layout` or the `pattern` by which Megatron divides the layers, if it is named; `others` are
    further options, which must be those that a plan writes.
    """

    text: str
    degrees: Mapping[str, int]
    written: Mapping[str, str]
    method: str | None = None  # else 1F1B, of several stages a device interleaved
    recompute: Recompute | None = None
    others: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Today:
        """Read numbers, a layout, a recomputation and a schedule, by our names, those of NVIDIA's tables, as arguments
        of Megatron-LM or options of Megatron-Bridge. Raises InputError for what is none of them."""
        whole = re.sub(r"\[([^\]]*)\]", lambda listed: listed[1].replace(",", " "), text)
        found, rest = megatron.take_arguments(whole, NAMES)
        named = {name: word for name, word in found.items() if word.lower() not in UNSET}
        written: dict[str, str] = {name: named.pop(name) for name in ("layout", "pattern") if name in named}
        level = named.pop("recompute", LEVELS[0] if "recompute" in found else None)
        unknown = [f"{name} {word}" for name, word in named.items() if not re.fullmatch("[0-9]{1,6}", word)]
        recompute = next((each for each in LEVELS if each == level), None)
        unknown += [f"recompute {level}"] * (level != recompute)
        method, others = None, dict[str, str]()
        for part in _OPTION.sub(r" --\1 ", re.sub(r"['\"\\]", " ", rest)).split(","):
            words = part.lower().split()
            first = [*takewhile(lambda word: not word.startswith("--"), words)]
            others |= settings.options_of(words[len(first) :])
            phrase = " ".join(first)
            method = phrase if phrase in SYSTEMS else method
            unknown += [phrase] * bool(phrase and phrase not in SYSTEMS)
        if unknown or not (found or others or method):
            raise _wrong(
                text,
                f"{(unknown or [''])[0]!r} is neither a number of {', '.join(DEGREES)} such as pp 4, "
                f"nor a published schedule such as 1f1b, nor recompute {', '.join(LEVELS)}",
            )
        if method and SYSTEMS[method].shape == "bidirectional":
            raise _wrong(text, f"{method} holds all parameters twice, which no plan counts")
        modules = others.pop("recompute-modules", "").split()
        if wrong := [module for module in modules if module not in MODULES]:
            counted = f"{', '.join(MODULES)} are; recompute none and recompute full give bounds of it"
            raise _wrong(text, f"recompute-modules {wrong[0]} is not counted, {counted}")
        if modules and recompute != "full":
            recompute = max((MODULES[module] for module in modules), key=LEVELS.index)
        degrees = {name: int(word) for name, word in named.items()}
        degrees |= {end: 1 for name, end in SPLIT.items() if others.pop(name, "").lower() == "true"}
        if others.get("use-megatron-fsdp") == "true":
            degrees.setdefault("zero", 3)
        if others.get("overlap-moe-expert-parallel-comm") == "true":
            method = method or "combined-1f1b"
        return cls(text, degrees, written, method, recompute, others)

    def require_written(self, candidate: Candidate) -> None:
        """Raises InputError for an option that a plan would not write for what this is: it is not counted so."""
        if not self.others:
            return
        overrides = (_OPTION.sub(r"--\1 ", line) for line in settings.bridge(candidate))
        written = settings.options_of(shlex.split(" ".join((*settings.megatron(candidate), *overrides))))
        for name, value in self.others.items():
            if value != written.get(name):
                is_written = f"{name} is {written[name]}" if name in written else "no plan writes it"
                raise _wrong(self.text, f"{name} {value} is not counted: {is_written}")

    def _division(self, question: Question, pp: int) -> dict[str, Any]:
        """The fields of a `Parallelism` by a layout or a pattern. Raises InputError if it is that of another model."""
        layers, modules = megatron.read_stages(self.written, pp, settings.hybrid_letters(question.model))
        if (mtp := sum(modules)) != question.run.mtp:
            raise _wrong(self.text, f"has {mtp} multi-token prediction modules, so --mtp {mtp}")
        return {"layers": layers, "mtp_stage": modules.index(mtp) if mtp else None, "chunks": len(layers) // pp}

    def estimates(self, question: Question) -> Iterator[Estimate]:
        """Yield the estimates of the stages that the schedule may be for. Raises InputError if there is no such
        division of the question's GPUs, batch and model."""
        named = dict(self.degrees)
        for name, size in (("batch", question.batch), ("sequence", question.run.sequence or question.model.sequence)):
            if (own := named.pop(name, size)) != size:
                raise _wrong(self.text, f"{name} {own}, but --{name} is {size}")
        size, chunks = named.pop("sequences", 1), named.pop("chunks", None)
        if each := named.pop("layers of a chunk", None):
            count, rest = divmod(question.model.layers, named.get("pp", 1) * each)
            if rest or not count or chunks not in (None, count):
                raise _wrong(self.text, f"{each} layers a chunk do not divide {question.model.layers} so")
            chunks = count
        ends = {end: named.pop(end) for end in ("first", "last", *SPLIT.values()) if end in named}
        degrees = {"tp": 1, "pp": 1, "cp": 1, "ep": 1} | named
        if question.limit and degrees["pp"] > 1:
            raise _wrong(self.text, question.limit)
        one = degrees["tp"] * degrees["pp"] * degrees["cp"]
        dp = degrees.setdefault("dp", question.gpus // max(1, one))
        replicas = dp * degrees["cp"]
        if one * dp != question.gpus:
            words = " · ".join(f"{name} {degrees[name]}" for name in ("tp", "pp", "cp", "dp"))
            raise _wrong(self.text, f"{words} are {one * dp} GPUs, there are {question.gpus}")
        if not size or question.batch % (dp * size):
            who = f"{dp} replicas of micro-batches of {size} sequences"
            raise _wrong(self.text, f"{who} must divide the batch of {question.batch}")
        if degrees["ep"] > 1 and (question.stack == "torch" or replicas % degrees["ep"]):
            degrees.setdefault("etp", 1)
        degrees.setdefault("zero", zeros(question, degrees["pp"], replicas)[-1 if question.stack == "torch" else 0])
        run = question.run_of(question.batch // dp // size, size, self.recompute or LEVELS[0])
        written = self._division(question, degrees["pp"]) if self.written else {}
        if written and ends:
            raise _wrong(self.text, f"a layout or pattern says which layers a stage has, also {next(iter(ends))}")
        if written and chunks not in (None, written["chunks"]):
            raise _wrong(self.text, f"has {written['chunks']} stages a rank, not chunks {chunks}")
        for count in (chunks,) if chunks is not None else (written.get("chunks", 1),) if written or ends else (1, 2):
            if ends:
                written = {"layers": megatron.uneven_layers(question.model.layers, degrees["pp"], count, ends)}
            for shape in SHAPES if count != 1 and not written else SHAPES[:1]:
                fields = degrees | {"chunks": count, "shape": shape} | written
                division = Parallelism.from_dict(fields, f"today = {self.text!r}")
                yield estimate(question.model, division, question.usable, run)


@dataclass(frozen=True)
class Running:
    """What runs today by the cost model, whether it fits or not.

    Attributes
    ----------
    schedule
        On GPUs of any memory.
    used_bytes
        What its fullest GPU needs.
    has_bytes
        The GPU's memory.
    assumed
        What was not named, such as `cp 1`, so that it is what the stack does by default; dp follows from the GPUs.
    fitting
        If it does not fit, what would make it fit, as text.
    """

    candidate: Candidate
    schedule: Schedule
    used_bytes: int
    has_bytes: int
    assumed: tuple[str, ...]
    fitting: tuple[str, ...] = ()

    @property
    def iteration_ms(self) -> float:
        return self.candidate.with_step_end(self.schedule.makespan_ms)

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.has_bytes


def running(today: Today, question: Question) -> Running:
    """What today means. Raises InputError if nothing can be divided so, or its schedule is for other stages."""
    estimated = method = reason = None
    for estimated in today.estimates(question):
        method = today.method or ("interleaved" if estimated.parallelism.chunks > 1 else "1f1b")
        try:
            schedule, needs = _scheduled(question, estimated, method)
        except InputError as error:  # not a schedule of these stages
            reason = error
            continue
        candidate = question.candidate(estimated)
        today.require_written(replace(candidate, schedule=schedule))
        has = estimated.parallelism.model_dump() | {"sequences": estimated.run.microbatch_size}
        without = {"dp", *["ep"] * (not question.model.experts)}
        without |= {"chunks"} if has["pp"] == 1 or today.written or "layers of a chunk" in today.degrees else set()
        names = [name for name in DEGREES if name not in {*today.degrees, *without} and has[name] is not None]
        assumed = tuple(f"{name} {has[name]}" for name in names)
        assumed += (f"recompute {LEVELS[0]}",) * (today.recompute is None) + (method,) * (today.method is None)
        found = Running(candidate, schedule, needs, question.gpu.memory_bytes, assumed)
        return found if found.fits else replace(found, fitting=_fitting(question, estimated, method))
    assert estimated
    raise _wrong(today.text, f"{method} is not a schedule of {Candidate(estimated)} ({reason}); name one")


def _wrong(today: str, why: str) -> InputError:
    return InputError(f"today = {today!r}: {why}")


def _scheduled(question: Question, estimated: Estimate, method: str) -> tuple[Schedule, int]:
    """The schedule on GPUs of any memory, and the bytes that its fullest GPU needs. Raises InputError if it is for
    other stages."""
    ample = question.candidate(estimated.with_memory(ROOMY))
    schedule = ample.as_run(generate(method, ample.problem))
    return schedule, max(ample.used_bytes(schedule))


def _fitting(question: Question, estimated: Estimate, method: str) -> tuple[str, ...]:
    """What would make it fit: gradients and optimizer of 16 bits, a level of recomputation, or only both together."""
    run, smaller = estimated.run, ({"gradient_bytes": 2}, {"gradient_bytes": 2, "optimizer_bytes": 8})
    levels = [{"recompute": level} for level in LEVELS[LEVELS.index(run.recompute) + 1 :]]

    def first(changes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        for change in changes:
            other = estimate(estimated.shape, estimated.parallelism, question.usable, run.model_copy(update=change))
            if (needs := _scheduled(question, other, method)[1]) <= question.gpu.memory_bytes:
                options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())
                yield f"{options.replace('--recompute', 'recompute')} ({needs / 1e9:.1f} GB)"
                return

    return (*first(smaller), *first(levels)) or tuple(first(smaller[-1] | level for level in levels))
