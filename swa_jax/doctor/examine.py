"""All findings, in the order of the report."""

import importlib.metadata
from collections.abc import Callable

import swa_jax
from swa_jax.doctor.devices import device_findings
from swa_jax.doctor.extras import extra_findings
from swa_jax.doctor.finding import FAILED, NOTE, PASSED, Finding, tried
from swa_jax.doctor.self_test import self_test_parts
from swa_jax.doctor.versions import version_findings


def examine(told: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Looks at everything; runs the self-test only where a device is.

    Args:
      told: called with what is looked at next.
    """
    told("looking at versions")
    found = [_package(), *version_findings()]
    told("looking at devices")
    devices = list(device_findings())
    found += [*devices, *extra_findings()]
    if all(finding.status != FAILED for finding in devices):
        for name, part in self_test_parts().items():
            told(f"self-test: {name}")
            found.append(tried("self-test", name, part))
    return found


def _package() -> Finding:
    """The code that runs should be that which pip believes to be installed."""
    seen = swa_jax.__version__
    try:
        installed = importlib.metadata.version("swa-jax")
    except importlib.metadata.PackageNotFoundError:
        return Finding("versions", "swa_jax", NOTE, f"{seen}, from a source tree, not installed")
    if installed != seen:
        text = f"{seen} is imported, {installed} is installed: pip install swa-jax again"
        return Finding("versions", "swa_jax", NOTE, text)
    return Finding("versions", "swa_jax", PASSED, seen)
