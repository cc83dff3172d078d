"""Describe the installation: versions, devices, extras and settings, as `repulsive doctor` prints them.

`collect` gathers the facts, `requirements` reads which packages each extra needs, `describe` formats the facts as text.
Nothing here needs an optional package, and torch may be missing or broken. Only `versions`, for the versions
that results depend on, needs torch.
"""
