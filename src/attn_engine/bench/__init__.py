"""Compare attn_engine with other libraries; the library itself never imports this package.

``cases`` has the problems, ``contenders`` the libraries, ``check`` verifies results, ``worker`` is
the process that runs one library, and ``compare`` starts the workers and collects their times.
``suites`` lists the cases of ``attn-engine bench``, ``session`` runs them, and ``files`` reads and
writes the results.
"""
