"""Serve one engine with OpenAI's API: `jaxspec serve`.

| file           | contents                                                              |
|----------------|-----------------------------------------------------------------------|
| worker.py      | the thread that owns the engine, and the batch that lives in it       |
| examples.py    | the requests for whose sizes it compiles                              |
| bodies.py      | bodies of requests, read and checked                                  |
| messages.py    | their messages, within the server's limits; fields.py: fields of JSON |
| answers.py     | bodies of answers, whole or in parts; streams.py sends the parts      |
| refusals.py    | errors in OpenAI's form                                               |
| metrics.py     | what Prometheus reads                                                 |
| app.py         | routes, and the server's settings                                     |
| connections.py | what connections may take; ids, hosts, the log                        |
| page/          | the page at `/`, and markdown-it, which it imports                    |

A request goes from the event loop to a thread that reads it (JSON, images, tokens), and from there
to the worker's queue. The worker publishes an answer on its `Ticket` as it grows, block by block.
"""
