"""`swa-jax doctor`: what it sees, what it says, and that a broken thing is a failure."""

import json

import jax
import jax.numpy as jnp
import pytest

from swa_jax import supported
from swa_jax.cli import main
from swa_jax.doctor import devices, examine, self_test
from swa_jax.doctor.devices import cache_finding, device_findings
from swa_jax.doctor.extras import extra_findings
from swa_jax.doctor.finding import FAILED, NOTE, PASSED, Finding, tried
from swa_jax.doctor.versions import compare, version_findings


def test_a_sound_machine_passes_the_self_test():
    parts = self_test.self_test_parts()
    assert list(parts) == [
        "laws, by calls",
        "laws, in one program",
        "lowering for cuda",
        "lowering for tpu",
    ]
    found = [tried("self-test", name, part) for name, part in parts.items()]
    assert {finding.status for finding in found} == {PASSED}, found


def test_a_broken_transition_fails_the_self_test(monkeypatch):
    monkeypatch.setattr(self_test.swa, "free_group_end", lambda state: state)
    found = tried("self-test", "laws, by calls", self_test._by_calls)
    assert found.status == FAILED
    assert "leaked: " in found.text


def test_a_refused_grant_fails_the_self_test(monkeypatch):
    life = self_test.life
    monkeypatch.setattr(self_test, "life", lambda state: (life(state)[0], jnp.bool_(False), []))
    found = tried("self-test", "laws, by calls", self_test._by_calls)
    assert (found.status, found.text) == (
        FAILED,
        "RuntimeError: a grant was refused though there was room",
    )


def test_devices_memories_and_donation():
    found = {finding.name: finding for finding in device_findings()}
    assert "cpu" in found["devices"].text
    assert "(default" in found["memory kinds"].text
    assert found["donation"] == Finding(
        "device", "donation", PASSED, "a donated state is updated in place"
    )
    assert found["x64"].text.startswith("off")


def test_no_device_is_a_failure(monkeypatch):
    def none():
        raise ValueError("JAX has no device for JAX_PLATFORMS='tpu': none")

    monkeypatch.setattr(devices, "need_device", none)
    (found,) = device_findings()
    assert (found.name, found.status) == ("devices", FAILED)


@pytest.mark.parametrize(
    ("seen", "status", "said"),
    [
        ("0.9.2", FAILED, '0.9.2; 0.10.0 is the oldest supported: pip install "jax>=0.10.0"'),
        ("0.10.0", PASSED, "0.10.0"),
        ("0.10.2", PASSED, "0.10.2"),
        ("0.10.3.dev7", NOTE, "0.10.3.dev7, newer than any that was tested (0.10.2)"),
        ("1.0", NOTE, "1.0, newer than any that was tested (0.10.2)"),
    ],
)
def test_versions_are_compared_as_numbers(seen, status, said):
    assert compare("jax", seen, "0.10.0", "0.10.2") == Finding("versions", "jax", status, said)


def test_a_patch_of_the_newest_python_is_not_newer():
    assert compare("python", "3.13.9", *supported.PYTHON).status == PASSED
    assert compare("python", "3.14.0", *supported.PYTHON).status == NOTE
    assert compare("python", "3.10.1", *supported.PYTHON).text.endswith("install a newer Python")
    assert [finding.name for finding in version_findings()] == ["python", "jax", "jaxlib", "numpy"]


def test_the_compilation_cache(tmp_path):
    assert cache_finding(None).status == NOTE
    assert "JAX_COMPILATION_CACHE_DIR" in cache_finding(None).text
    assert cache_finding(str(tmp_path / "not" / "yet")).status == PASSED
    assert cache_finding("gs://bucket/cache").status == PASSED
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in cache_finding(str(tmp_path / "file" / "x")).text


def test_missing_extras_say_how_they_come(monkeypatch):
    from swa_jax.doctor import extras

    monkeypatch.setattr(
        extras, "_version", lambda name: None if name in ("typer", "uvicorn") else "1"
    )
    found = {finding.name: finding for finding in extra_findings()}
    assert found["plot"].text == "matplotlib 1"
    assert found["cli"].text == 'typer missing, for this command: pip install "swa-jax[cli]"'
    assert found["serve"].status == NOTE


@pytest.fixture
def findings(monkeypatch):
    """Replaces what is found."""
    seen = [Finding("versions", "jax", PASSED, "1"), Finding("device", "cache", NOTE, "none")]
    monkeypatch.setattr(examine, "examine", lambda told: seen)
    return seen


def test_the_report_and_its_exit_code(findings, capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "nothing is broken, 1 note"
    findings.append(Finding("self-test", "laws", FAILED, "InvariantError: law 3"))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "InvariantError: law 3" in said
    assert said.splitlines()[-1] == "FAILED: laws"
    assert main(["doctor", "--quiet"]) == 1
    assert "none" not in capsys.readouterr().out


def test_the_report_as_json(findings, capsys):
    assert main(["doctor", "--quiet", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "ok": True,
        "findings": [vars(finding) for finding in findings],
    }


def test_the_self_test_is_left_out_where_nothing_runs(monkeypatch):
    none = [Finding("device", "devices", FAILED, "none")]
    monkeypatch.setattr(examine, "device_findings", lambda: none)
    monkeypatch.setattr(examine, "self_test_parts", pytest.fail)
    assert [finding.status for finding in examine.examine()].count(FAILED) >= 1


def test_donation_that_is_not_there_is_a_note(monkeypatch):
    real = jax.jit
    monkeypatch.setattr(devices.jax, "jit", lambda work, donate_argnums: real(work))
    found = {finding.name: finding for finding in device_findings()}
    assert found["donation"].status == NOTE
