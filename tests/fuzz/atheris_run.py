"""Coverage-guided fuzzing of one parser; not part of the suite. Needs the PyPI package atheris (Linux).

    python tests/fuzz/atheris_run.py layout_set -max_total_time=120 [CORPUS_FOLDER]
    python tests/fuzz/atheris_run.py --list

A finding is written by libFuzzer as crash-<digest> into the working directory; give it as an argument to
run it again. The options are libFuzzer's; unless given, memory is limited to 1 GiB and one input to 20 s.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import atheris

sys.path[:0] = [
    str(Path(__file__).parents[2] / folder) for folder in (".", "proto", "server", "trainer_hooks")
]

with atheris.instrument_imports(include=["ckpt"]):
    from tests.fuzz.mutate import spoil
    from tests.fuzz.targets import TARGETS, read


def main() -> None:
    """Fuzz the target that the command line names until libFuzzer ends the process."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--list"
    if name not in TARGETS:
        sys.stdout.write("\n".join(TARGETS) + "\n")
        raise SystemExit(0 if name == "--list" else 2)
    target = TARGETS[name]

    def one_input(data: bytes) -> None:
        read(target, data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        return spoil([data, *target.seeds], random, target.message)[:max_size]

    options = [sys.argv[0], *sys.argv[2:]]
    for option in ("-rss_limit_mb=1024", "-timeout=20", "-max_len=65536"):
        if not any(given.startswith(option.partition("=")[0]) for given in options):
            options.append(option)
    atheris.Setup(options, one_input, custom_mutator=mutate)
    for seed in target.seeds:
        one_input(seed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
