"""What a traced ``forward`` makes of its list of edges before it gathers by it: other lists."""
