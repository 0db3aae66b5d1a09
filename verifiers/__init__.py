"""Verifiers: one file a kind of check; `router` leads from a task's domain to its verifier, `checking` is shared.

A verifier judges the artifacts of a finished episode in a sandbox of its own; nothing that the policy wrote runs or is
trusted outside it, and what can't be judged raises `InfraError`.
"""
