"""Serve one engine with OpenAI's API: `jaxspec serve`.

| file           | contents                                                        |
|----------------|-----------------------------------------------------------------|
| worker.py      | the thread that owns the engine, and the batch that lives in it |
| examples.py    | the requests for whose sizes it compiles                        |
| bodies.py      | bodies of requests, read and checked; fields.py their fields    |
| answers.py     | bodies of answers, whole or in parts                            |
| metrics.py     | what Prometheus reads                                           |
| app.py         | routes, limits, errors                                          |
| connections.py | what connections may take; ids, hosts, the log                  |
| page/          | the page at `/`, and markdown-it, which it imports              |

A request goes from the event loop to a thread that reads it (JSON, images, tokens), and from there
to the worker's queue. The worker publishes an answer's parts on its `Ticket`, block by block.
"""
