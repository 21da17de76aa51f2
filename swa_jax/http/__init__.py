"""An OpenAI-compatible server on the serving loop. Needs the extra `serve`."""

from swa_jax.http.app import make_app
from swa_jax.http.engine import Engine
from swa_jax.http.figures import Figures, as_prometheus
from swa_jax.http.server import Server, bind, serve_until_stopped
from swa_jax.http.world_owner import Served

__all__ = (
    "Engine",
    "Figures",
    "Served",
    "Server",
    "as_prometheus",
    "bind",
    "make_app",
    "serve_until_stopped",
)
