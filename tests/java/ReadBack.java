import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;

import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.HashingScheme;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.MessageRouter;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TopicMetadata;
import org.apache.pulsar.client.impl.MessageImpl;
import org.apache.pulsar.client.impl.SinglePartitionMessageRouterImpl;
import org.apache.pulsar.client.impl.TopicMessageImpl;
import org.apache.pulsar.common.api.proto.MessageMetadata;

/**
 * What Pulsar's own client for Java makes of a topic, one JSON object per line:
 *
 * <pre>
 * read URL TOPIC COUNT                            COUNT messages from the start, and whatever is there beyond them
 * key-shared URL TOPIC SUBSCRIPTION COUNT [JOIN]  who of two consumers got what; the second joins after JOIN messages
 * partitions PARTITIONS                           the partition of each key: in base64 on stdin, up to "." or the end
 * </pre>
 *
 * Without arguments it takes such commands from stdin, words separated by tabs, and ends each answer with an empty line:
 * a virtual machine takes seconds to become fast, so the tests start one for all of them.
 */
public final class ReadBack {
    private static final int PATIENCE_SECONDS = 20;
    private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private static final BufferedReader IN =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    private static final Map<String, PulsarClient> CLIENTS = new HashMap<>();

    public static void main(String[] arguments) throws IOException {
        int status = 0;
        if (arguments.length > 0) {
            status = run(arguments) ? 0 : 1;
        } else {
            for (String line = IN.readLine(); line != null; line = IN.readLine()) {
                run(line.split("\t"));
                OUT.println();
                OUT.flush();
            }
        }
        OUT.flush();
        Runtime.getRuntime().halt(status); // closing the client takes seconds, and nobody needs what it would tidy
    }

    private static boolean run(String[] words) {
        try {
            switch (words[0]) {
                case "read" -> read(client(words[1]), words[2], Integer.parseInt(words[3]));
                case "key-shared" -> {
                    int join = words.length > 5 ? Integer.parseInt(words[5]) : 0;
                    keyShared(client(words[1]), words[2], words[3], Integer.parseInt(words[4]), join);
                }
                case "partitions" -> partitions(Integer.parseInt(words[1]));
                default -> throw new IllegalArgumentException("no such command: " + words[0]);
            }
            return true;
        } catch (Exception error) {
            error.printStackTrace();
            OUT.println(new Json().add("error", error.toString()));
            return false;
        }
    }

    private static PulsarClient client(String url) throws IOException {
        PulsarClient client = CLIENTS.get(url);
        if (client == null) {
            client = PulsarClient.builder().serviceUrl(url).build();
            CLIENTS.put(url, client);
        }
        return client;
    }

    private static void read(PulsarClient client, String topic, int count) throws Exception {
        try (Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(MessageId.earliest).create()) {
            for (int index = 0; index < count || reader.hasMessageAvailable(); index++) {
                Message<byte[]> message = reader.readNext(PATIENCE_SECONDS, TimeUnit.SECONDS);
                if (message == null) {
                    throw new IllegalStateException("waited in vain for message " + index + " of " + count);
                }
                OUT.println(described(message));
            }
        }
    }

    private static Json described(Message<byte[]> message) {
        MessageIdAdv id = (MessageIdAdv) message.getMessageId();
        Json properties = new Json();
        new TreeMap<>(message.getProperties()).forEach(properties::add);
        return new Json()
                .add("topic", message.getTopicName())
                .add("key", message.getKey())
                .add("properties", properties)
                .add("body", Base64.getEncoder().encodeToString(message.getData()))
                .add("value_is_null", message.getValue() == null)
                .add("ordering_key", message.getOrderingKey() == null ? null : new String(message.getOrderingKey()))
                .add("sequence_id", message.getSequenceId())
                .add("producer", message.getProducerName())
                .add("publish_time", message.getPublishTime())
                .add("event_time", message.getEventTime())
                .add("compression", metadata(message).getCompression().name())
                .add("ledger", id.getLedgerId())
                .add("entry", id.getEntryId())
                .add("partition", id.getPartitionIndex())
                .add("batch_index", id.getBatchIndex())
                .add("batch_size", id.getBatchSize());
    }

    private static MessageMetadata metadata(Message<byte[]> message) {
        Message<byte[]> inner = message instanceof TopicMessageImpl<byte[]> of ? of.getMessage() : message;
        return ((MessageImpl<byte[]>) inner).getMessageBuilder();
    }

    private static void keyShared(PulsarClient client, String topic, String subscription, int count, int join)
            throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(2);
        AtomicInteger left = new AtomicInteger(count);
        List<Future<Void>> running = new ArrayList<>();
        try (Consumer<byte[]> first = consumer(client, topic, subscription, "first")) {
            if (join > 0) {
                running.add(threads.submit(work(first, left)));
                first.resume();
                while (left.get() > count - join && !running.get(0).isDone()) {
                    Thread.sleep(1);
                }
            }
            try (Consumer<byte[]> second = consumer(client, topic, subscription, "second")) {
                if (join == 0) { // nobody has got anything before both are there
                    running.add(threads.submit(work(first, left)));
                    first.resume();
                }
                running.add(threads.submit(work(second, left)));
                second.resume();
                for (Future<Void> each : running) {
                    each.get();
                }
            }
        } finally {
            threads.shutdownNow();
        }
    }

    private static Consumer<byte[]> consumer(PulsarClient client, String topic, String subscription, String name)
            throws IOException {
        return client.newConsumer()
                .topic(topic)
                .subscriptionName(subscription)
                .subscriptionType(SubscriptionType.Key_Shared)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .consumerName(name)
                .receiverQueueSize(10) // so that the first one cannot take all that there is
                .acknowledgmentGroupTime(0, TimeUnit.MILLISECONDS)
                .startPaused(true)
                .subscribe();
    }

    private static Callable<Void> work(Consumer<byte[]> consumer, AtomicInteger left) {
        return () -> {
            long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(PATIENCE_SECONDS);
            while (left.get() > 0) {
                if (System.nanoTime() > deadline) {
                    throw new IllegalStateException(left.get() + " messages did not come");
                }
                Message<byte[]> message = consumer.receive(50, TimeUnit.MILLISECONDS);
                if (message != null) {
                    happened("received", consumer, message);
                    Thread.sleep(1); // time for the other one to interfere
                    happened("done", consumer, message); // before the broker knows, so before it can move the key
                    consumer.acknowledge(message);
                    left.decrementAndGet();
                }
            }
            return null;
        };
    }

    private static void happened(String what, Consumer<byte[]> consumer, Message<byte[]> message) {
        Json line = new Json()
                .add("event", what)
                .add("consumer", consumer.getConsumerName())
                .add("key", message.getKey())
                .add("sequence_id", message.getSequenceId())
                .add("topic", message.getTopicName());
        synchronized (OUT) {
            OUT.println(line);
        }
    }

    private static void partitions(int partitions) throws IOException {
        MessageRouter router = new SinglePartitionMessageRouterImpl(0, HashingScheme.Murmur3_32Hash);
        TopicMetadata topic = () -> partitions;
        for (String line = IN.readLine(); line != null && !line.equals("."); line = IN.readLine()) {
            String key = new String(Base64.getDecoder().decode(line), StandardCharsets.UTF_8);
            MessageMetadata metadata = new MessageMetadata().setPartitionKey(key);
            Message<byte[]> message = MessageImpl.create(metadata, ByteBuffer.allocate(0), Schema.BYTES, "any");
            OUT.println(router.choosePartition(message, topic));
        }
    }

    /** A JSON object, all in ASCII: what the terminal makes of other letters does not matter then. */
    private static final class Json {
        private final StringJoiner fields = new StringJoiner(", ", "{", "}");

        Json add(String name, Object value) {
            String text = value instanceof String string ? quoted(string) : String.valueOf(value);
            fields.add(quoted(name) + ": " + text);
            return this;
        }

        private static String quoted(String text) {
            StringBuilder quoted = new StringBuilder("\"");
            for (char each : text.toCharArray()) {
                if (each < ' ' || each > '~' || each == '"' || each == '\\') {
                    quoted.append(String.format("\\u%04x", (int) each));
                } else {
                    quoted.append(each);
                }
            }
            return quoted.append('"').toString();
        }

        @Override
        public String toString() {
            return fields.toString();
        }
    }
}
