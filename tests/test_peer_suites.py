"""The runner of the peers' own test files: which imports it changes, and how it sorts cases."""

import pytest

from tests.peers import suite_reasons
from tests.peers.suites import SGL_JAX, SGLANG, judge, naming, rewritten

NAMES = ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator")


def test_only_imports_of_the_classes_in_question_change():
    source = "\n".join(
        [
            "import os",
            "from sglang.srt.mem_cache.allocator import (",
            "    BaseTokenToKVPoolAllocator,",
            "    TokenToKVPoolAllocator as Mine,",
            ")",
            "from sglang.srt.utils import TokenToKVPoolAllocator",
            "def late():",
            "    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator",
        ]
    )
    expected = "\n".join(
        [
            "import os",
            "from tests.peers.torch_bridge import TokenToKVPoolAllocator as Mine",
            "from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator",
            "from sglang.srt.utils import TokenToKVPoolAllocator",
            "def late():",
            "    from tests.peers.torch_bridge import PagedTokenToKVPoolAllocator",
            "",
        ]
    )
    assert rewritten(source, SGLANG.modules, SGLANG.ours, NAMES) == expected


def test_what_the_peer_itself_does_not_pass_is_not_applicable(monkeypatch):
    monkeypatch.setitem(suite_reasons.REASONS, "test_x.py::C.inside", "looks inside")
    theirs = dict.fromkeys(["C.good", "C.bad", "C.inside"], ("passed", ""))
    theirs |= {"C.cuda": ("skipped", "no CUDA"), "C.old": ("failed", "ImportError")}
    ours = {
        "C.good": ("passed", ""),
        "C.bad": ("failed", "1 != 2"),
        "C.inside": ("failed", "no such attribute"),
        "C.old": ("passed", ""),
    }
    outcome = judge("test_x.py", theirs, ours)
    assert (outcome.cases, outcome.passed) == (5, 1)
    assert outcome.failed == {"C.bad": "1 != 2"}
    assert outcome.not_applicable == {
        "C.inside": "looks inside",
        "C.cuda": "skipped: no CUDA",
        "C.old": "fails on the peer itself: ImportError",
    }


def test_a_file_that_cannot_be_read_with_our_imports_fails():
    outcome = judge("test_x.py", {"C.good": ("passed", "")}, {})
    assert list(outcome.failed) == ["C.good"]


def test_files_that_name_a_class_are_found(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_one.py").write_text("TokenToKVPoolAllocator")
    (tmp_path / "test_two.py").write_text("nothing")
    (tmp_path / "three.py").write_text("TokenToKVPoolAllocator")
    assert [file.name for file in naming(tmp_path, NAMES)] == ["test_one.py"]


@pytest.mark.parametrize("peer", [SGL_JAX, SGLANG], ids=lambda peer: peer.name)
def test_what_is_run_before_a_file_is_python(peer):
    for registers in (False, True):
        compile(peer.conftest(registers=registers), "conftest.py", "exec")
