"""Tools that come from servers of the Model Context Protocol (MCP)."""
