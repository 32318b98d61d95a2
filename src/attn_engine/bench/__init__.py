"""attn_engine beside what a user would pick instead; nothing of the library imports this package.

``cases`` are the problems, ``contenders`` the libraries, ``check`` the right answers, ``worker``
the process that runs one library, ``compare`` the referee that starts the workers and keeps the
score.
``suites`` are the questions of ``attn-engine bench``, ``session`` asks them and keeps ``files``.
"""
