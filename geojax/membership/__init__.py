"""Membership: who takes part in a run of islands, decided in one record with compare-and-set."""
