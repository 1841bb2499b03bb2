"""Profiles: log evidences along one learnt range of a trained network."""

from laplace_invariance.marglik.profiles.compute import profile
from laplace_invariance.marglik.profiles.results import Profile, profile_of

__all__ = ["Profile", "profile", "profile_of"]
