"""Errors in the format of OpenAI's API."""

from typing import Any, Literal

ErrorCode = Literal[
    "invalid_request",
    "unsupported_parameter",
    "invalid_api_key",
    "model_not_found",
    "too_many_requests",
    "response_not_found",
    "not_found",
    "context_length_exceeded",
    "session_over",
    "infrastructure_failure",
    "internal_error",
]
MAX_MESSAGE_CHARACTERS = 1000
"""Maximum characters of an error message, which may repeat the client's input."""
ErrorType = Literal["invalid_request_error", "server_error", "model_error"]


class ApiError(Exception):
    """Ends a request with an HTTP status and an error body."""

    def __init__(
        self,
        status: int,
        code: ErrorCode | None,
        message: str,
        *,
        parameter: str | None = None,
        kind: ErrorType | None = None,
    ) -> None:
        """Create an error.

        Args:
            status: HTTP status.
            code: reason for programs.
            message: reason for people.
            parameter: wrong key of the request, such as ``messages[2].content``.
            kind: OpenAI's type of the error. Default: the type for the status.
        """
        super().__init__(message[:MAX_MESSAGE_CHARACTERS])
        self.status = status
        self.code = code
        self.parameter = parameter
        self.kind: ErrorType = kind or ("invalid_request_error" if status < 500 else "server_error")

    def __reduce__(self) -> Any:
        # Workers also raise it, and pickle would pass only the message.
        state = {"parameter": self.parameter, "kind": self.kind}
        return type(self), (self.status, self.code, str(self)), state

    def body(self) -> dict[str, Any]:
        """Return the response body of OpenAI's API: ``{"error": {...}}``."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.parameter,
                "code": self.code,
            }
        }


def invalid_request(message: str, parameter: str) -> ApiError:
    """Return the error for a request with a wrong value. The message begins with its key."""
    return ApiError(400, "invalid_request", f"{parameter}: {message}", parameter=parameter)


def unsupported_error(parameter: str, reason: str) -> ApiError:
    """Return the error for a parameter that the gateway does not support."""
    message = f"{parameter} is not supported here: {reason}"
    return ApiError(400, "unsupported_parameter", message, parameter=parameter)


def invalid_content(reason: str) -> ApiError:
    """Return the error for a malformed turn, as OpenAI's servers report it.

    Args:
        reason: kind of the format error.
    """
    message = f"The model produced invalid content ({reason})."
    return ApiError(500, None, message, kind="model_error")
