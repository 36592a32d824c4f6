"""Errors, in the shape that OpenAI's API and its clients have for them."""

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
LONGEST_MESSAGE = 1000
"""Characters of an error: it may repeat what the client has sent."""
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
        """Make an error.

        Args:
            status: HTTP status.
            code: the reason, for programs.
            message: the reason, for people.
            parameter: key of the request that is wrong, such as ``messages[2].content``.
            kind: OpenAI's type of the error; None for the one of the status.
        """
        super().__init__(message[:LONGEST_MESSAGE])
        self.status = status
        self.code = code
        self.parameter = parameter
        self.kind: ErrorType = kind or ("invalid_request_error" if status < 500 else "server_error")

    def __reduce__(self) -> Any:
        # Workers raise it, too, and pickle would pass the message alone.
        state = {"parameter": self.parameter, "kind": self.kind}
        return type(self), (self.status, self.code, str(self)), state

    def body(self) -> dict[str, Any]:
        """Return what OpenAI's API answers: ``{"error": {...}}``."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.parameter,
                "code": self.code,
            }
        }


def invalid_request(message: str, parameter: str) -> ApiError:
    """Make the error of a request with a wrong value; the message begins with its key."""
    return ApiError(400, "invalid_request", f"{parameter}: {message}", parameter=parameter)


def invalid_content(reason: str) -> ApiError:
    """Make the error of a turn that is not legal, as OpenAI's servers report it.

    ``reason``: kind of the format error.
    """
    message = f"The model produced invalid content ({reason})."
    return ApiError(500, None, message, kind="model_error")
