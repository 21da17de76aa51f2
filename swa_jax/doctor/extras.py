"""Which of the optional parts can be used here."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from swa_jax.doctor.finding import NOTE, PASSED, Finding

# What each extra of pyproject.toml brings, by the names that pip knows; what only contributors
# need is not among them.
EXTRAS = {
    "cli": ("rich", "typer"),
    "plot": ("matplotlib",),
    "models": ("safetensors",),
    "checkpoint": ("orbax-checkpoint",),
    "serve": ("rich", "typer", "safetensors", "starlette", "tokenizers", "uvicorn"),
    "debug": ("hypothesis",),
}
_FOR = {
    "cli": "this command",
    "plot": "pictures: --plot, swa-jax viz, swa_jax.viz",
    "models": "checkpoints",
    "checkpoint": "swa_jax.saved_state, serve-http --cache-dir",
    "serve": "swa-jax generate, swa-jax serve-http",
    "debug": "swa_jax.debug.shrink",
}


def extra_findings() -> Iterator[Finding]:
    """Each extra, with the command that brings what is missing."""
    for extra, packages in EXTRAS.items():
        found = {package: _version(package) for package in packages}
        missing = [package for package, seen in found.items() if seen is None]
        if missing:
            how = f'pip install "swa-jax[{extra}]"'
            text = f"{', '.join(missing)} missing, for {_FOR[extra]}: {how}"
            yield Finding("extras", extra, NOTE, text)
        else:
            text = ", ".join(f"{package} {seen}" for package, seen in found.items())
            yield Finding("extras", extra, PASSED, text)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
