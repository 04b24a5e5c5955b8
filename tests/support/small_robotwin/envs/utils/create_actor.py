"""Where RoboTwin keeps the exception of a scene that does not come to rest."""


class UnStableError(Exception):
    pass
