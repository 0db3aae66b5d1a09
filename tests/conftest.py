"""What all tests share: hypothesis has no deadline, since a busy machine is no defect."""

from hypothesis import settings

settings.register_profile("postrl", deadline=None)
settings.load_profile("postrl")
