"""Refusals, in the shape that OpenAI's API and its clients have for them."""

from typing import Any, Literal

ErrorCode = Literal[
    "invalid_request",
    "unsupported_parameter",
    "invalid_api_key",
    "response_not_found",
    "not_found",
    "context_length_exceeded",
    "format_error",
    "session_over",
    "infrastructure_failure",
    "internal_error",
]


class ApiError(Exception):
    """Ends a request with an HTTP status and an error body."""

    def __init__(
        self,
        status: int,
        code: ErrorCode,
        message: str,
        *,
        parameter: str | None = None,
    ) -> None:
        """``parameter``: the key of the request that is wrong, such as ``messages[2].content``."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.parameter = parameter

    def body(self) -> dict[str, Any]:
        """Return what OpenAI's API answers: ``{"error": {...}}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.parameter,
                "code": self.code,
            }
        }


def invalid_request(message: str, parameter: str) -> ApiError:
    """Make the error of a request with a wrong value; the message begins with its key."""
    return ApiError(400, "invalid_request", f"{parameter}: {message}", parameter=parameter)
