"""``attn-engine report``: result files as one page, as Markdown and as JSON.

``load`` reads the files, ``charts`` and ``sections`` say what they mean, ``svg`` and ``tables``
draw it, ``write`` puts it into files.
"""
