"""An MCP server on standard input and output whose tool doubles numbers."""

from mcp.server import MCPServer

server = MCPServer("doubler")


@server.tool()
def double(n: int) -> int:
    """Double."""
    return 2 * n


if __name__ == "__main__":
    server.run("stdio")
