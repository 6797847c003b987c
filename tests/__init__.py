"""Tests: whole parts through their doors; the one fake is the scripted engine."""
