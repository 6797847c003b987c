"""Runs of several processes on one database: who beats, who is dead, what nobody owns yet."""
