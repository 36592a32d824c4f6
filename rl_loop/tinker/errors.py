"""Errors of requests to the Tinker API."""

from aiohttp import web

from rl_loop.gateway.errors import ApiError, ErrorCode


class ClientError(Exception):
    """A request that the client must change. It ends the request's future with a user error."""


def not_found(message: str) -> ApiError:
    """Return the error for an object that does not exist."""
    return ApiError(404, "not_found", message)


def bad_request(message: str) -> ApiError:
    """Return the error for a call whose values are wrong."""
    code: ErrorCode = "invalid_request"
    return ApiError(400, code, message)


def error_response(error: ApiError) -> web.Response:
    """Return an error in the format of the Tinker API."""
    response = web.json_response({"detail": str(error)}, status=error.status)
    # The body of a refused request may not have been read.
    if error.status in (401, 408, 413, 415):
        response.force_close()
    return response
