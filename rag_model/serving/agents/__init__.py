"""A snapshot as tools of an agent, by the Model Context Protocol (MCP)."""
