"""NVTX without Nsight: a library of our own takes the profiler's place and writes down what it is told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.observe.nvtx import INJECTION, Silent, open_ranges

PROGRAM = """
from staleflow.observe.nvtx import open_ranges
ranges = open_ranges()
assert ranges.on
for version in (3, 4):
    with ranges.range("pull", version):
        with ranges.range("wait", version):
            pass
try:
    with ranges.range("generate", 4):
        raise KeyError
except KeyError:
    pass
"""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    pytest.importorskip("nvtx")
    library = tmp_path_factory.mktemp("nvtx") / "recorder.so"
    source = Path(__file__).with_name("nvtx_recorder.c")
    subprocess.run([compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def record(program, library, path):
    environment = os.environ | {INJECTION: str(library), "NVTX_RECORD": str(path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    return path.read_text().splitlines()


def test_ranges_carry_domain_name_and_version_nest_and_close(recorder, tmp_path):
    lines = record(PROGRAM, recorder, tmp_path / "record")
    assert "domain staleflow" in lines
    events = [line.split()[2:] if line.startswith("push") else "pop" for line in lines if " staleflow" in line][1:]
    assert events == [
        *(["pull", "3"], ["wait", "3"], "pop", "pop"),
        *(["pull", "4"], ["wait", "4"], "pop", "pop"),
        *(["generate", "4"], "pop"),
    ]


def test_spans_of_a_rank_are_ranges_too(recorder, tmp_path):
    program = f"""
from pathlib import Path
from staleflow.observe.spans import Spans
spans = Spans(Path({str(tmp_path / "trace")!r}))
spans.state("generate", version=1)
spans.state("generate", version=1)
with spans.span("pull", version=2):
    spans.state("wait")
spans.close()
"""
    lines = record(program, recorder, tmp_path / "record")
    assert lines[1:] == [
        "start staleflow generate 1 1",
        "push staleflow pull 2",
        "end staleflow 1",
        "start staleflow wait 0 2",
        "pop staleflow",
        "end staleflow 2",
    ]


def test_without_a_profiler_nothing_is_imported():
    program = (
        "import sys; from staleflow.observe.nvtx import open_ranges; r = open_ranges({})\n"
        "with r.range('pull', 1): pass\n"
        "assert 'nvtx' not in sys.modules and not r.on"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert type(open_ranges({})) is Silent
