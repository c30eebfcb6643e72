"""Stand-ins for rows of the edges, and for what functions make of them."""
