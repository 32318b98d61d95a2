"""``attn-engine report``: result files as one page, as Markdown and as JSON.

``load`` reads the files, ``charts`` and ``sections`` choose the content, ``svg`` and ``tables``
draw it, ``write`` writes the files.
"""
