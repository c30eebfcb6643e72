"""Deciding the route of a call: the request, the candidates, their costs, and the plan."""
