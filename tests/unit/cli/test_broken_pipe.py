"""A command ends quietly when what reads its output has ended."""

import subprocess
import sys

PROGRAM = """
from cli.serve import ending_in_sentences

with ending_in_sentences():
    while True:
        print("a line", flush=True)
"""


def test_a_command_whose_output_nothing_reads_ends_as_other_tools_do() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == b"a line\n"
        program.stdout.close()
        complaint = program.stderr.read()

    assert (program.returncode, complaint) == (141, b"")
