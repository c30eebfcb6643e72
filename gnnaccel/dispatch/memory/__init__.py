"""Memory of a layer's calls, so that one like an earlier one is decided at a glance."""
