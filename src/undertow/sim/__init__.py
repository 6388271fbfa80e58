"""Simulation: schedules, plans and whole steps on machines that need not be here. Imports no torch."""
