"""The routes of the server."""

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from swa_jax.http.answers import error_answer, json_answer
from swa_jax.http.completion_request import Limits, unknown_model
from swa_jax.http.completions import Completions
from swa_jax.http.engine import Engine
from swa_jax.http.errors import ApiError
from swa_jax.http.figures import as_prometheus
from swa_jax.text import TextTokenizer

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(
    engine: Engine, model_name: str, tokenizer: TextTokenizer, vocab_size: int
) -> Starlette:
    """The server as an ASGI application.

    Args:
      engine: serves; started and stopped by the caller.
      model_name: what clients call the model.
      tokenizer: of the model.
      vocab_size: token ids are below this.
    """
    served = engine.served
    limits = Limits(model_name, vocab_size, served.config.max_context, served.places)
    pages = _Pages(engine, limits)
    completions = Completions(engine, limits, tokenizer)
    routes = [
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/metrics", pages.metrics),
        Route("/health", pages.health),
    ]
    handlers = {
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientDisconnect: _nobody,
        Exception: _bug,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


class _Pages:
    """What is there beside completions."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine, self._limits = engine, limits
        self._created = int(time.time())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._limits.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "swa-jax",
            "max_model_len": self._limits.max_context,
        }

    async def models(self, request: Request) -> Response:
        return json_answer({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._limits.model_name:
            raise unknown_model(name, self._limits)
        return json_answer(self._model())

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(as_prometheus(self._engine.figures), media_type=_PROMETHEUS)

    async def health(self, request: Request) -> Response:
        if self._engine.is_taking_jobs:
            return json_answer({"status": "ok"})
        status = "stopping" if self._engine.error is None else "failed"
        return json_answer({"status": status}, 503)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_answer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.url.path} here; this server has /v1/completions, /v1/models, "
        "/metrics and /health",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    headers = dict(error.headers or {})
    return error_answer(ApiError(error.status_code, message, headers=headers))


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


async def _bug(request: Request, error: Exception) -> Response:
    return error_answer(ApiError(500, "the server has a bug; its log says where", "server_error"))
