"""Which way a call goes: what is asked, the candidates, what they cost, and the plan."""
