"""Requests at random, from a seed: nothing that can be sent may end a server, or fail as its fault."""
