"""What goes wrong, in the form in which OpenAI's clients expect it."""

from dataclasses import dataclass, field

RETRY_SECONDS = 1


@dataclass
class ApiError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        what = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": what}


def bad_value(param: str, message: str) -> ApiError:
    """400: an argument that cannot be served; the message goes on after its name."""
    return ApiError(400, f"{param} {message}", param=param)


class QueueFullError(Exception):
    """No place is left; one will be soon."""


class StoppingError(Exception):
    """The server takes no new requests, or has cut this one off."""


class EngineError(Exception):
    """The engine has failed."""


def answer_to(error: Exception) -> ApiError:
    """The answer where the engine did not serve a request."""
    again = {"Retry-After": str(RETRY_SECONDS)}
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "rate_limit_error", code="queue_full", headers=again)
    if isinstance(error, StoppingError):
        return ApiError(503, str(error), "server_error", code="stopping", headers=again)
    return ApiError(500, "the server has failed; its log says why", "server_error")
