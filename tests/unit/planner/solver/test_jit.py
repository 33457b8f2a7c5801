"""Machine code is kept for one text of the kernels, and for no other."""

from pathlib import Path

import numba

from services.planner.solver.jit import SOURCES, digest_of


def test_the_cache_is_named_after_the_text_of_every_kernel(tmp_path: Path) -> None:
    one, other = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1")
    other.write_text("y = 1")
    before = digest_of([one, other])
    other.write_text("y = 2")

    assert digest_of([one, other]) != before
    assert Path(numba.config.CACHE_DIR).name == f"kernels-{digest_of(SOURCES)}"


def test_every_module_with_compiled_functions_counts() -> None:
    folder = Path(__file__).parents[3] / "services" / "planner"
    compiled = {path for path in folder.rglob("*.py") if "@compiled" in path.read_text()}

    assert compiled <= set(SOURCES)
