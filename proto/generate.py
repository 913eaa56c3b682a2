"""Generate the protobuf code beside the .proto files, or into another folder (the up-to-date test does).

Run by the environment that `make proto` sets up; needs grpcio-tools in the pinned version.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).parent
PINNED = "1.71.2"


def generate(out: Path) -> None:
    """Write ``ckpt_proto/v1/*_pb2*`` below ``out``."""
    from grpc_tools import protoc  # only this environment has it

    if version("grpcio-tools") != PINNED:
        sys.exit(f"grpcio-tools {PINNED} generates this code: run `make proto`")
    protos = sorted(str(path) for path in (HERE / "ckpt_proto" / "v1").glob("*.proto"))
    include = str(files("grpc_tools") / "_proto")
    services = [path for path in protos if "\nservice " in Path(path).read_text()]
    common = ["protoc", f"-I{HERE}", f"-I{include}"]
    for command in (
        [*common, f"--python_out={out}", f"--pyi_out={out}", *protos],
        [*common, f"--grpc_python_out={out}", *services],
    ):
        if protoc.main(command) != 0:
            sys.exit("protoc failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    generate(parser.parse_args().out)
